"""The console script `fusionrun`, which a checkout that is not installed does not have.

TEST_INTERRUPT_GRACE: seconds that workers have to end when a person interrupts, instead of the usual ones.
TEST_SETTLE: seconds from the first failure until the others are stopped, instead of the usual ones.
TEST_WIDTH: hosts up to which all are reached from the launcher's.
"""

import os
import sys

from fusion_rt.runner.command.cli import main
from fusion_rt.runner.decisions import fixed
from fusion_rt.runner.launch import agents, launcher

launcher.INTERRUPT_GRACE = float(os.environ.get("TEST_INTERRUPT_GRACE", launcher.INTERRUPT_GRACE))
fixed.SETTLE_S = float(os.environ.get("TEST_SETTLE", fixed.SETTLE_S))
agents.WIDTH = int(os.environ.get("TEST_WIDTH", agents.WIDTH))
sys.exit(main())
