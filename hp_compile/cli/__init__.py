"""The command line: ``hp-compile`` and ``python -m hp_compile``; one command a file, ``app.py`` puts them together."""
