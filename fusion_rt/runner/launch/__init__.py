"""The launcher's side of `fusionrun`: it reaches hosts, carries out what `decisions` decide, and tells people."""
