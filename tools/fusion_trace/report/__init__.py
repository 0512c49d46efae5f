"""What `fusion-trace report` writes: one self-contained HTML page about a job.

analysis.py   everything the page is about, as figures; by:
links.py      ... what went over each link, and how fast
curves.py     ... what a step would take with other links
findings.py   what was found, in sentences
charts.py     figures as plotly's charts
sections.py   figures as sentences, charts and tables, which parts.py defines
page.py       these as HTML; template.html has the style and the script
"""
