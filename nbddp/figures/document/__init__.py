"""Figures as documents: SVG with its data, in HTML that every front end can show.

    capability   Sheet, rows, chart    what is drawn: bars, lines and texts, each part with its words
        |
    svg          one picture           places in percent of the width, heights in pixels: text never shrinks
        |
    page         HTML                  <img src="data:image/svg+xml,…"> under invisible titled spans, and `live.js`
        |
    live.js      in the browser        puts the SVG in place of the <img>: keyboard, cards, zoom

A front end that removes scripts shows the picture with its tooltips, one that removes styles the picture, and one
without HTML the text. In an <img>, `light-dark()` follows the theme of the page around it. So the picture needs no
style of the page. Pure: no matplotlib here.
"""
