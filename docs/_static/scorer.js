// What a search prefers: pages with a word in their title come first, then messages; the changelog comes last.
var Scorer = {
  score: ([page, title, anchor, description, score, file]) =>
    score + (/reference.(messages|reports)/.test(page) ? 4 : /changelog/.test(page) ? -4 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
