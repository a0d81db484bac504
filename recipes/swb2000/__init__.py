"""SWB-2000: Switchboard-1, Fisher and CallHome, scored on Hub5-2000."""
