"""The campaign: real processes, broken on purpose, and everything that they serve compared.

`python -m faults --share quick`, with this directory's parent on the path. See README.md.
"""
