"""One training loop for pre-training, distillation and fine-tuning, with its optimizers, checkpoints and schedules."""
