"""Models and optimizers as transformers and PEFT describe them: from a configuration, without a training script."""
