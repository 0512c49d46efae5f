"""The launcher's side of `fusionrun`: it reaches hosts, decides what becomes of the job, and tells people.

`fixed` and `epochs` decide and do no I/O, with `places` (who gets which rank), `worker_states` and `blacklist`;
`launcher` carries it out.
"""
