"""The live page: a picture of the iterations. `docs/dashboard.md` tells what it shows."""
