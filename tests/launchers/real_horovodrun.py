"""The real `horovodrun`, for the Python that has the package.

It refuses `--gloo` unless it finds Gloo in one of its compiled extensions for the frameworks, none of which it needs:
Gloo is for the workers, and these are not Horovod's here. Everything else is as it comes.
"""

from horovod.runner import launch

if __name__ == "__main__":  # it starts processes with multiprocessing
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
