"""Other engines that the benchmarks measure Kvant against, and the scripts that build them."""
