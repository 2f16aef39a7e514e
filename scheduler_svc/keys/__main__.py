"""`python -m scheduler_svc.keys`: as `gilir keys`."""

import sys

from scheduler_svc.keys.command import main

raise SystemExit(main(sys.argv[1:], "python -m scheduler_svc.keys"))
