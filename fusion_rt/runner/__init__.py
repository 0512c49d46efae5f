"""`fusionrun`: starts one daemon and the workers of a job on every host, and ends them all together.

The command line (`command`) becomes a `launch.launch_plan.LaunchPlan`; `launch` carries it out. It reaches each host
through an `agent_link`, which runs one `agent` there; the agent checks the host, starts the daemon and the workers and
sends what they print back. `protocol` has what both sides say, and how.
"""
