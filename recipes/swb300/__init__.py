"""SWB-300: Switchboard-1 with MS-State's transcripts, scored on Hub5-2000."""
