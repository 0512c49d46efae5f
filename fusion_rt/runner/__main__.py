"""`python -m fusion_rt.runner` is `fusionrun`."""

import sys

from fusion_rt.runner.command.cli import main

sys.exit(main())
