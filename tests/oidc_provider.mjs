// A provider of the registry's `oidc-provider`: node server.mjs PORT, its private keys in KEYS.

import Provider from "oidc-provider";

const port = Number(process.argv[2]);
const keys = JSON.parse(process.env.KEYS);
const resourceServer = {
  audience: "vllm-gateway",
  scope: "",
  accessTokenFormat: "jwt",
  accessTokenTTL: 600,
  jwt: {sign: {alg: keys[0].alg, kid: keys[0].kid}},
};

const provider = new Provider(`http://127.0.0.1:${port}`, {
  jwks: {keys},
  clients: [{
    client_id: "agent",
    client_secret: "the-secret-of-agent",
    grant_types: ["client_credentials"],
    redirect_uris: [],
    response_types: [],
  }],
  features: {
    clientCredentials: {enabled: true},
    devInteractions: {enabled: false},
    resourceIndicators: {
      enabled: true,
      defaultResource: () => "https://gateway.example/",
      getResourceServerInfo: () => resourceServer,
    },
  },
  extraTokenClaims: () => ({team: "research"}),
});
provider.listen(port, "127.0.0.1");
