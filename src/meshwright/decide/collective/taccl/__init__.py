"""TACCL: routing and scheduling by mixed-integer programs under a communication sketch."""
