"""The command line of `fusionrun`, its YAML file, and `fusion_rt.run`'s launcher: from requests to a plan."""
