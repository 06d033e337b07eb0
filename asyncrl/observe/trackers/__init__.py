"""Trackers: TensorBoard, Weights & Biases, MLflow, Trackio and users' classes."""
