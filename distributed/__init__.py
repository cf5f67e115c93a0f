"""The machines: find, trust, check, provision, measure, plan, launch, supervise."""
