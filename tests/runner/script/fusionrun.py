"""The console script `fusionrun`, which a checkout that is not installed does not have.

TEST_INTERRUPT_GRACE: seconds that workers have to end when a person interrupts, instead of the usual ones.
"""

import os
import sys

from fusion_rt.runner import base
from fusion_rt.runner.cli import main

base.INTERRUPT_GRACE = float(os.environ.get("TEST_INTERRUPT_GRACE", base.INTERRUPT_GRACE))
sys.exit(main())
