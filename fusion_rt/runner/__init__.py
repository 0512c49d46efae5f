"""`fusionrun`: starts one daemon and the workers of a job on every host, and ends them all together.

The command line (`command`) becomes a `launch.launch_plan.LaunchPlan`; `launch` carries it out. It runs one
`agent` on each host, locally or over ssh; the agent checks the host, starts the daemon and the workers, and sends their
output back. `protocol` has the messages of both sides, and their encoding.
"""
