"""`gilir up`: the services as processes of this machine, kept alive until a signal ends them."""
