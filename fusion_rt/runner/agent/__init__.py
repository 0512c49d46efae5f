"""One host's side of `fusionrun`: checks, daemons and workers."""
