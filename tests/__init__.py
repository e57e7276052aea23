"""Tests of the three packages; the folders mirror the tree."""
