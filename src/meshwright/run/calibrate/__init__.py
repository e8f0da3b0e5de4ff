"""What messages and operators cost on the machine a run has, measured by the run itself."""
