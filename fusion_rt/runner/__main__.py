"""`python -m fusion_rt.runner` is `fusionrun`."""

import sys

from fusion_rt.runner.cli import main

sys.exit(main())
