"""Sets torchrun's variables in a worker that another launcher has started, for whoever looks at them before
`init_process_group` (which needs nobody to: `fusion_rt.c10d.variables`).

Accelerate, Transformers and Lightning look for a worker's place there.
"""

from __future__ import annotations

from fusion_rt.c10d.variables import set_variables

__all__ = ["set_variables"]
