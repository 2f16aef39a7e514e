"""The scheduler service: a pure core, the loop that drives it, and the HTTP frontends. Imports no torch."""
