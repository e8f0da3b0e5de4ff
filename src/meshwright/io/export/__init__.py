"""A training plan's layout in other systems' words: torchtitan, Megatron-LM, DeepSpeed."""
