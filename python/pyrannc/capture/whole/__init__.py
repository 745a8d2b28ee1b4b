"""What stays whole in a trace: sub-modules, functions, branches and loops, each one Op."""
