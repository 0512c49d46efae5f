"""fusiond: the daemon that owns all communication of a node. Started by `fusionrun`, or by the first worker."""
