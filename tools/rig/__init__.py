"""`kvpool-rig`: guests with emulated CXL, DAX and NUMA devices, and the pool on each of them."""
