"""Programs for GPUs that `test_simulated_gpus.py` runs on simulated ones."""
