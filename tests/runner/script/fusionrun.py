"""The console script `fusionrun`, which a checkout that is not installed does not have."""

import sys

from fusion_rt.runner.cli import main

sys.exit(main())
