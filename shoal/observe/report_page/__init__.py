"""The page of recorded runs: what it shows, and the assets that show it.

    record.py     reads the folder of `shoal run --record`
    sections.py   which sections a run has, as data; one HTML file with data and assets inside of it
    traffic.py    bytes from process to process, and over the links of a cluster
    schedules.py  the schedule of a run's collective or pipeline, round by round
    prediction.py predicted beside measured

An item of a section is a dict whose "type" is the function of assets/page.js that draws it.
"""
