"""`fusionrun`: starts one daemon and the workers of a job on every host, and ends them all together.

The command line (`cli`) becomes a `plan.LaunchPlan`; `launch` carries it out. It reaches each host through a `link`,
which runs one `agent` there; the agent checks the host (`preflight`), starts the daemon and the workers and sends
what they print back. What the two say to each other is in `messages`.
"""
