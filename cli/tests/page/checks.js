{
  // Elements that are wider than the window, but for those that scroll by themselves.
  overflows() {
    const found = [];
    if (document.documentElement.scrollWidth > innerWidth)
      found.push('the page is ' + document.documentElement.scrollWidth + ' wide');
    for (const element of document.body.querySelectorAll('*')) {
      if (element.closest('.scroll') && !element.matches('.scroll')) continue;
      const box = element.getBoundingClientRect();
      if (box.width && box.right > innerWidth + 1 && !element.matches('.skip'))
        found.push(element.tagName + '#' + element.id + ' ends at ' + box.right);
      if (element.matches('dd, dt, button, h1, h2') && element.scrollWidth > element.clientWidth + 1 && element.clientWidth)
        found.push(element.tagName + ' ' + element.textContent + ' is cut off');
    }
    return found;
  },

  // Texts whose contrast is below that of WCAG 2.2, level AA.
  faint() {
    const parse = text => {
      const numbers = text.match(/[\d.]+/g).map(Number);
      return numbers.length < 4 ? [...numbers, 1] : numbers;
    };
    const over = (top, below) => [0, 1, 2].map(at => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
    const light = colour => {
      const [r, g, b] = colour.map(value => value / 255).map(value =>
        value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
      const layers = [];
      for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
      return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement, style = getComputedStyle(element);
      if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
      if (element.closest('script, style, noscript, .skip, :disabled')) continue;
      const background = behind(element);
      const colour = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
      let opacity = 1;
      for (let at = element; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
      const text = parse(colour);
      text[3] *= opacity;
      const [a, b] = [light(over(text, background)), light(background)];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      if (ratio < (isLarge ? 3 : 4.5)) found.push(walker.currentNode.textContent.trim() + ': ' + ratio.toFixed(2));
    }
    return found;
  },

  // The element that has the focus, and whether that is visible.
  focus() {
    const element = document.activeElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
    const isOutlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    const isOnPage = element === document.body || (box.width > 0 && box.left >= 0 && box.right <= innerWidth + 1);
    return { name: element.id || element.tagName, visible: element === document.body || (isOutlined && isOnPage) };
  },
}
