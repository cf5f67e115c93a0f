"""Scripted machines and scripted runs: tour, pictures and the screens' tests need no network and no training.

Every figure in here is made up. All machines are named ``demo-...`` and the profile ``scripted-demo``, so that no
screen and no run folder can be taken for a measurement.
"""
