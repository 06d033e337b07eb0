"""Where a run is shown beside its own files: TensorBoard and others, one small file each."""
