"""Tests of versions of vLLM: `make compat` runs tests on real engines of each, and writes a table.

environments   an environment per version
results        what the tests of a version said, and the table in docs/versions.md
"""
