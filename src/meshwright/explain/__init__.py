"""Why a plan is as it is: time and memory by stage and phase, assumptions and their errors, rivals, and what would change the answer."""
