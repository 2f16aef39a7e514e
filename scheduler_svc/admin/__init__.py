"""The admin API: what operators see of executors and models, and how they steer them, on a port of its own.

A process of its own serves HTTP (`app`, `link`); the core answers it (`desk`, `roster`, `steering`).
"""
