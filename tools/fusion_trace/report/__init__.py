"""Pages for people: one module for each command that prints one, and the HTML report.

    wording.py    how pages say times, sizes, places and problems
    *_page.py     the page of one command

The HTML report (`fusion-trace report`):

    figures.py    everything that the page is about, as figures; curves.py: the what-ifs among them
    findings.py   findings, in sentences
    charts.py     figures as plotly's charts
    sections.py   figures as sentences, charts and tables
    html_page.py  these as HTML; template.html has the style and the script
"""
