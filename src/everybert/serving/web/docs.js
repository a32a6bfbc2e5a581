// The API reference: every endpoint of openapi.json with its description, an example request and an example response.
const api = await (await fetch("openapi.json")).json();
const example = (part) => part?.content?.["application/json"]?.example;
const element = (name, text, ...children) => {
  const made = document.createElement(name);
  made.append(...(text === null ? [] : [text]), ...children);
  return made;
};

for (const [path, methods] of Object.entries(api.paths)) {
  for (const [method, about] of Object.entries(methods)) {
    const body = example(about.requestBody);
    const answer = example(about.responses["200"]);
    const { model, ...sent } = body ?? {};
    const call = `curl ${location.origin}${path}` + (body ? ` --json '${JSON.stringify(sent)}'` : "");
    document.querySelector("main").append(
      element("h2", `${method.toUpperCase()} ${path}`),
      element("p", about.description ?? ""),
      element("pre", call),
      ...(answer ? [element("pre", JSON.stringify(answer, null, 2))] : []),
    );
  }
}
