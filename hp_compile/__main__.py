"""``python -m hp_compile``."""

from hp_compile.cli.app import main

if __name__ == "__main__":
    main()
