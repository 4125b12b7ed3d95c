"""Starting a run on many ranks through mpirun or msrun, and watching over it."""
