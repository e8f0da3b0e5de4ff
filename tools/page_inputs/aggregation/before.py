import numpy as np

rank, world, array = 0, 1, np.arange(64, dtype=np.float32)
