"""The benchmark: ways to train side by side in one run, each in a process of its own.

``autofuse bench MODEL`` from the command line; `race.race` and `figures.results` from Python.
"""
