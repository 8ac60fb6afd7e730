"""The parts of examples/train_moe.py: text, model, expert layers, training, table and report."""
