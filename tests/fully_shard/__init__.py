"""Tests of the eager path."""
