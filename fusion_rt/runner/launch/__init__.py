"""The launcher's side of `fusionrun`: it reaches hosts, carries out decisions of `decisions`, and tells people."""
