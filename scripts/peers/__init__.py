"""What scripts/bench_peers.py times: shapes, products, MLPs, layers, other libraries, the clock."""
