"""`python -m scheduler_svc.cli`: as `gilir`."""

from scheduler_svc.cli.entry import main

raise SystemExit(main())
